"""What a run would need, said before it is started: by compiling its real step for machines that are not here."""

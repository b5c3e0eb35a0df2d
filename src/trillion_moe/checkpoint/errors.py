"""The one error of this package: everything found wrong with a checkpoint, at once."""

from collections.abc import Iterable
from pathlib import Path

SHOWN = 50  # findings printed; the rest is counted


class CheckpointError(ValueError):
    """`findings` are whole sentences that name file and tensor, all of them; the message shows the first 50."""

    def __init__(self, where: str | Path, findings: Iterable[str]):
        self.where, self.findings = str(where), tuple(findings)
        lines = [f"  - {finding}" for finding in self.findings[:SHOWN]]
        if len(self.findings) > SHOWN:
            lines.append(f"  ... and {len(self.findings) - SHOWN} more")
        super().__init__(f"{where}: {len(self.findings)} problem(s)\n" + "\n".join(lines))

    def __reduce__(self):
        return type(self), (self.where, self.findings)

"""Text and images on their way to the model, on the host: tokenizers, chat templates, image processing."""

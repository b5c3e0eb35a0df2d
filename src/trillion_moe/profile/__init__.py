"""What a mesh and a training step do on the devices that are there: times, bandwidths, and where a step goes."""

from trillion_moe.profile.errors import ProfileError

__all__ = ["ProfileError"]

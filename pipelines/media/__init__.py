"""Frames to bytes: PNG, JPEG and WebP pictures, MP4 clips, thumbnails. The same frames always give the same bytes."""

from pipelines.media.encode import encode_frames, encode_thumbnail
from pipelines.media.sound import Sound

__all__ = ["Sound", "encode_frames", "encode_thumbnail"]

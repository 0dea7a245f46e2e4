"""Frames to bytes: PNG, JPEG and WebP pictures, MP4 clips, thumbnails. The same frames always give the same bytes."""

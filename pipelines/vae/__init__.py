"""Auto-encoders: decoding in strips, in chunks of frames, and on several devices."""

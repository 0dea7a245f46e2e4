"""TensorRT multi-device engines: export of a sharded module, build, engine cache, runtime."""

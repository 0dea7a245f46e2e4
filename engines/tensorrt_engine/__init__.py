"""TensorRT multi-device engines: export of a sharded module, build, plan cache, check without a GPU, runtime."""

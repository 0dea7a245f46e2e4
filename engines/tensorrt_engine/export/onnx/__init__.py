"""ONNX as TensorRT takes it: graphs of traced cores, and collectives as nodes in them."""

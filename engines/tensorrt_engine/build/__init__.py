"""From ONNX to an engine file: TensorRT's builder, and caches of what it made."""

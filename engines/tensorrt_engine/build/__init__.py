"""TensorRT's builder (ONNX to engine file), and caches of engine files and exports."""

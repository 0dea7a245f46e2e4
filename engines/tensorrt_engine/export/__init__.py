"""Export of a model to ONNX: trace, partition, translation of collectives, segments."""

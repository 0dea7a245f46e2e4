"""From a model to ONNX: traced, its collectives marked and translated, cut where an engine cannot go on."""

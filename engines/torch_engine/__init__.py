"""The PyTorch engine: a family's module split over any team of a gang, eager on the CPU, compiled on GPUs."""

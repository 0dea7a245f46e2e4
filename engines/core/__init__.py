"""What engines, strategies, gangs and models share: contracts and plain records. Imports nothing else of engines."""

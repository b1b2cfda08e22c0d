"""Expert shift and routing replay."""

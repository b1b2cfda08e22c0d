"""The Megatron model: building it, its attention, its weights, its optimizer."""

"""Measurements on a real pretrained language model: its gap in every precision, from dumps of real jobs."""

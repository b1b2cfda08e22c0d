"""Metrics of a run: the log, the live display, the HTML report, and sinks that send metrics to dashboards."""

"""The collapse lab: rows of finished runs, statistics, claims and their rules, figures, the page."""

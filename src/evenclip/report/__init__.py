"""Human-readable results: tables for the terminal, progress display, and an HTML page."""

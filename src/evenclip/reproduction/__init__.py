"""The paper's printed numbers, tables and figures, and their reproduction."""

"""The paper as data: its settings, its printed numbers, its tables and figures."""

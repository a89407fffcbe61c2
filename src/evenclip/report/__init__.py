"""Results for people to read: tables for the terminal, progress. Knows no paper and trains nothing."""

"""Results for people to read: tables for the terminal, progress, a page. Knows no paper and trains
nothing.
"""

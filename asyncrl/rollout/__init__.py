"""Generates groups: the rollouter, its supervisor, the generation client that resumes, and the router.

Runs in: rollouter; driver (supervisor).
"""

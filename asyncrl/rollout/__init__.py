"""Generates groups: the rollouter, its supervisor, the generation client that resumes interrupted responses, the
router.

Runs in: rollouter; driver (supervisor).
"""

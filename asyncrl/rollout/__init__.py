"""Generates groups: the rollouter, the generation client that resumes interrupted responses, the router.

Runs in: rollouter.
"""

"""Requests and replies of the OpenAI, Responses and Anthropic APIs: one reading, one reply, a dialect each.

Runs in: rollouter (the agents' endpoint), serving.
"""

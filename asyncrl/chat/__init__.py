"""Requests and replies of the OpenAI, Responses and Anthropic APIs: one reader, one reply, one dialect per API.

Runs in: rollouter (the agents' endpoint), serving.
"""

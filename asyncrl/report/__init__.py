"""`asyncrl-report RUN_DIR`: one HTML file about a run and its problems, which needs no network and no server.

Runs in: its own command.
"""

"""`asyncrl-report RUN_DIR`: one HTML file about a run, with what ails it, that needs no network and no server.

Runs in: its own command.
"""

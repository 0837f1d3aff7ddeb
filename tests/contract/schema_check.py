"""A check for schemathesis, which loads it by SCHEMATHESIS_HOOKS: what the schema allows is served, unless it breaks a
rule that a schema cannot say."""

import schemathesis


@schemathesis.check
def served_or_told_why(ctx, response, case):
    if case.meta is None or not case.meta.generation.mode.is_positive or response.status_code != 400:
        return
    error = response.json()["error"]
    if case.path.startswith(("/v1/responses", "/v1/messages")):
        return  # what their items and blocks hold is checked as a chat completion, which their schemas do not repeat
    told = error["code"] == "context_length_exceeded"
    told |= error["param"] in ("min_tokens", "tool_choice", "response_format")
    # what a schema cannot say of messages and tools
    why = ("valid JSON", "content: it is missing", "the same name", ".name: this server does not support it")
    why = (*why, "asked: an image")  # that it is one, and that the model reads images
    assert told or any(reason in error["message"] for reason in why), error

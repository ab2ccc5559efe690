"""The names that conversations use: roles, and the fields that hold reasoning."""

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response", "ipython"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
}
"""Names of roles in use, and the role that each means; `call`: an assistant's turn that holds a tool call as JSON."""
REASONING = ("reasoning_content", "reasoning", "thinking", "thought")
"""The fields of a turn that may hold its reasoning; chat templates read one or two of them."""

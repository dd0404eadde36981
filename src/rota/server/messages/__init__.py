"""POST /v1/messages: conversations in Anthropic's shape, answered by the same means as a chat."""

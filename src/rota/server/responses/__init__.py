"""POST /v1/responses: OpenAI's newer route, answered by the same means as a chat."""

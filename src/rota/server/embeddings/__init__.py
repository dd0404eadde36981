"""POST /v1/embeddings, /v1/score and /v1/rerank: texts as vectors of the served model, and how near they are."""

#!/bin/sh
# Ask a running server: start it with `rota serve`, then run examples/curl.sh [URL]
set -eu
url="${1:-http://127.0.0.1:30000}"

echo "Is it ready?"
curl --silent --fail "$url/health"

echo; echo "Which model?"
curl --silent --fail "$url/v1/models"

echo; echo "A completion:"
curl --silent --fail "$url/v1/completions" -H "Content-Type: application/json" \
    -d '{"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}'

echo; echo "Two at once, as streams, ending at a line break:"
curl --silent --fail --no-buffer "$url/v1/completions" -H "Content-Type: application/json" \
    -d '{"prompt": ["One, two,", "A, B,"], "max_tokens": 12, "stop": "\n", "stream": true,
         "stream_options": {"include_usage": true}}'

"""The slot engine behind HTTP: `worker` runs it, `requests` and `answers` use OpenAI's format, `app` joins them."""

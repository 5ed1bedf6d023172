"""The slot engine behind HTTP: `worker` runs it, `requests` and `answers` speak OpenAI's format, `app` joins them."""

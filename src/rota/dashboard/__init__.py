"""The dashboard shows events as a live page, and replays a journal on the same page."""

"""The HTTP server: OpenAI's image calls, chat, jobs and a web page in front of one queue and its workers.

Read `app.py` first. A request goes gate -> route -> service -> queue -> replica -> worker process -> answer.
"""

"""OpenAI's dialect: completions and chats."""

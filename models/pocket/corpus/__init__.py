"""The generator of the pocket model's training text: words, stories, facts and chats. All of it
is our own text (CC0-1.0)."""

//! The OpenAI HTTP API: types, chat templates, stop strings, streaming.

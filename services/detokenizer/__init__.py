"""The detokenizer service: a replica's front door, from token ids to streamed text. No torch."""

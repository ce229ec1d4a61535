"""From protocol requests to engine sequences, and from engine output to protocol responses."""

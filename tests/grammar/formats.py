"""What answers of these tests are held to: the formats of JSON schemas."""

from __future__ import annotations

import jsonschema

# RFC 3339 lets a second be 60, and grammars do. The checks of times, where their package is installed, do not.
FORMATS = jsonschema.FormatChecker(set(jsonschema.FormatChecker.checkers) - {"date-time", "time"})

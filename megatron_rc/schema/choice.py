"""A choice by name: one table of name -> row, which the type of a setting, its documentation and its errors read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rc.schema.limits import check_one_of


@dataclass(frozen=True, eq=False)
class Choice:
    """The names of ``table``, as in `engine: Annotated[str, Choice(ENGINES)]`.

    A row is a sentence or has the field `sentence`, which `megatron-rc settings` prints after the setting's docstring.
    """

    table: Mapping[str, Any]

    @property
    def sentences(self) -> str:
        said = {name: row if isinstance(row, str) else getattr(row, "sentence", "") for name, row in self.table.items()}
        return " ".join(f"{name}: {sentence}" for name, sentence in said.items() if sentence)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(self._checked)

    def _checked(self, name: Any) -> Any:
        check_one_of("", name, self.table)
        return name

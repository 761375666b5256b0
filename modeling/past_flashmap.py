"""What a call leaves for the next one on the same text: a chat's next turn runs only new tokens.

The target's cache and the drafter's context both hold a text. The next prompt keeps them as far as
it begins with the same tokens; what they hold beyond is dropped. Layers that cannot go back, which
windows and recurrent states are, keep a text only if the prompt begins with all of it.
"""

from typing import Any

from transformers import PreTrainedModel

from .cache_flashmap import FlashMapCache
from .target_flashmap import can_go_back


class FlashMapPast:
    """Both caches of one text. Make it with `new_past`, pass it to every call of a conversation; it
    changes in place. A call that fails on the way leaves it empty.

    Attributes:
        text: token ids that the caches hold.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self._owners: tuple[Any, Any] | None = None
        self._caches: tuple[Any, FlashMapCache] | None = None
        self._limit: int | None = None

    @property
    def length(self) -> int:
        """Number of tokens that the caches hold."""
        return len(self.text)

    def check(self, drafter: Any, target: PreTrainedModel, num_prompts: int) -> None:
        """Raise ValueError for several prompts, or a drafter or target that is not the caches'."""
        if num_prompts > 1:
            raise ValueError(
                f"past holds one text, input_ids holds {num_prompts}: pass one prompt a call, each"
                " conversation with a past of its own."
            )
        if self._owners is None:
            return
        for name, own, other in zip(
            ("drafter", "target"), self._owners, (drafter, target), strict=True
        ):
            if own is not other:
                raise ValueError(
                    f"past holds {self.length} tokens of another {name} ({type(own).__name__}):"
                    " make one with new_past() for this pair."
                )

    def common(self, prompt: list[int], target: PreTrainedModel, limit: int | None) -> int:
        """How many of a prompt's tokens the caches may keep: never all, since the target has to say
        what comes next. `limit` is the `position_limit` of the prompt."""
        if limit != self._limit:  # the target's rotary embedding has changed
            return 0
        pairs = zip(self.text, prompt[:-1], strict=False)
        same = next((place for place, (old, new) in enumerate(pairs) if old != new), None)
        if same is None:
            same = min(self.length, len(prompt) - 1)
        return same if same == self.length or can_go_back(target) else 0

    def caches(self) -> tuple[Any, FlashMapCache]:
        """The target's cache and the drafter's context."""
        assert self._caches is not None
        return self._caches

    def hold(
        self, drafter: Any, target: PreTrainedModel, caches: tuple[Any, FlashMapCache],
        limit: int | None,
    ) -> None:  # fmt: skip
        """Hold these caches from now on; `text` says of what."""
        self._owners, self._caches, self._limit = (drafter, target), caches, limit

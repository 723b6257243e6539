"""Many generations with bounded concurrency: results as they finish, and a progress bar."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rollout.client.types import GenerateOptions, GenerationOutput
from rollout.core.errors import BadRequest

Request = str | Sequence[int] | Mapping[str, Any]
"""A prompt as text or as token ids, or the arguments of `generate` (`prompt` among them, or `input_ids`)."""
Result = GenerationOutput | list[GenerationOutput] | Exception
Generate = Callable[..., Awaitable[GenerationOutput | list[GenerationOutput]]]


async def generate_many(
    generate: Generate,
    requests: Iterable[Request],
    concurrency: int,
    progress: bool,
    options: GenerateOptions,
) -> AsyncGenerator[tuple[int, Result], None]:
    """Yield (index, result) of each request as it finishes; at most `concurrency` are on their way.

    `requests` is read as there is room.  Results wait for the caller: with `concurrency` of them waiting, no more
    requests are begun.  Closing the iterator cancels the requests on their way.
    """
    if concurrency < 1:
        raise BadRequest(f"concurrency must be at least 1, got {concurrency}")
    todo = enumerate(requests)
    finished: asyncio.Queue[tuple[int, Result] | BaseException | None] = asyncio.Queue(concurrency)

    async def work() -> None:
        """Run requests until there are none; then put None into `finished`, or the error that `requests` raised."""
        try:
            for index, request in todo:
                try:
                    result: Result = await generate(**arguments_of(request, options))
                except Exception as error:
                    result = error
                await finished.put((index, result))
        except Exception as error:
            await finished.put(error)
        else:
            await finished.put(None)

    workers = [asyncio.ensure_future(work()) for _ in range(concurrency)]
    try:
        with _bar(requests, progress) as count:
            for _ in workers:
                while (item := await finished.get()) is not None:
                    if isinstance(item, BaseException):
                        raise item
                    count(item[1])
                    yield item
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def arguments_of(request: Request, options: GenerateOptions) -> dict[str, Any]:
    """Return the arguments of `generate`: the request's own over the shared ones."""
    if isinstance(request, str):
        return {"prompt": request, **options}
    if isinstance(request, Mapping):
        return {**options, **request}
    return {**options, "input_ids": request}


@contextlib.contextmanager
def _bar(requests: Iterable[Request], is_wanted: bool) -> Iterator[Callable[[Result], None]]:
    """Yield a function to call with each result.  Draws on stderr if that is a terminal."""
    console = Console(stderr=True)
    if not (is_wanted and console.is_terminal):
        yield lambda result: None
        return
    text = TextColumn("{task.description}  {task.fields[tokens]:,} tokens, {task.fields[failed]} failed")
    total = len(requests) if isinstance(requests, Sized) else None
    tokens = failed = 0
    with Progress(text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("rollout", total=total, tokens=0, failed=0)

        def count(result: Result) -> None:
            nonlocal tokens, failed
            outputs = [] if isinstance(result, Exception) else result if isinstance(result, list) else [result]
            tokens += sum(len(output.output_ids) for output in outputs)
            failed += isinstance(result, Exception)
            progress.update(task, advance=1, tokens=tokens, failed=failed)

        yield count

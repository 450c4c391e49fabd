"""Stored results, boards and reviews of a line, as `/api` shows them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from agent.doors.http.station import Shown
from agent.faults.errors import OrderRefused, Reason
from agent.records.station.pages import BoardQuery, ListedResult, ResultQuery, StationReader
from agent.records.station.reviews import ReviewQuery, ReviewReader
from agent.records.station.reworks import reworks_of
from agent.service.station import views
from agent.service.station.shown import result_view, steps_of, tile_of_row, values_of
from agent.sources.folder.files.inbox import Inbox
from experts.expert import Verdict
from experts.thresholds.map_pictures import heat_png

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from agent.config import LineConfig
    from agent.records.boards import BoardRun, BoardVerdict
    from agent.records.result_writer import ResultStore
    from agent.service.station import questions as asked
    from agent.service.station.pictures import Pictures

    CourseOf = Callable[[str], Mapping[str, Any] | None]

EVER = datetime(1970, 1, 1, tzinfo=UTC)
PARTS = 2_000  # of a board's page


class StoredRows:
    """For any thread."""

    def __init__(
        self, store: ResultStore, pictures: Pictures, course_of: CourseOf, config: Callable[[], LineConfig],
        runs: Callable[[str], Iterable[BoardRun]],
    ) -> None:  # fmt: skip
        """``course_of``: course of a key's latest request, while known; ``runs``: a serial's boards, while known."""
        self._store = store
        self._path = store.path
        self._pages = StationReader(store.path)
        self._pictures = pictures
        self._course_of = course_of
        self._config = config
        self._runs = runs
        self.reviews_read = ReviewReader(store.path)

    def results(self, query: asked.ResultsAsked) -> views.ResultsDocument:
        verdicts = tuple(Verdict) if query.verdict is None else (Verdict(query.verdict),)
        given = query.model_dump(exclude={"verdict"}) | {"source": self._source(query.source)}
        found = self._pages.page(ResultQuery(verdicts, **given))
        next_ = found[-1].result.seq if len(found) == query.limit else None
        return views.ResultsDocument(tuple(result_view(one, self._config()) for one in found), next_)

    def result(self, query: asked.OfResult) -> views.ResultDetail:
        seq = query.seq
        listed, reviews = self._listed(seq), self.reviews_read.of_result(seq)
        result = listed.result
        return views.ResultDetail(
            **values_of(listed, self._config()),
            steps=steps_of(result, [each.step for each in self._store.maps(seq)]),
            box=result.subject.box,
            size=self._pictures.size(listed.result),
            config_sha256=result.config_sha256,
            reviews=reviews,
            timeline=result.course or self._course_of(result.subject.key),
        )

    def _source(self, name: str | None) -> str | None:
        """Beginning of a source's keys; a folder's has its digest."""
        digests = {str(folder.path): Inbox(folder.path, "").source for folder in self._config().intake.folders}
        return None if name is None else digests.get(name, name)

    def _listed(self, seq: int) -> ListedResult:
        """Raises OrderRefused for an unknown number."""
        found = self._pages.listed(seq)
        if found is None:
            raise OrderRefused(Reason.NOT_FOUND, f"no result {seq}", field="seq")
        return found

    def image(self, query: asked.ImageAsked) -> Shown:
        return self._pictures.part(self._listed(query.seq).result, query.width)

    def thumbnail(self, query: asked.OfResult) -> Shown:
        return self._pictures.thumbnail(self._listed(query.seq).result)

    def frame(self, query: asked.ImageAsked) -> Shown:
        return self._pictures.frame(self._listed(query.seq).result, query.width)

    def heat(self, query: asked.MapAsked) -> Shown:
        kept = {each.step: each.png for each in self._store.maps(self._listed(query.seq).result.seq)}
        try:
            return Shown(heat_png(kept[query.step]), "image/png")
        except KeyError:
            reason = f"result {query.seq} has no anomaly map of step {query.step}"
            raise OrderRefused(Reason.NOT_FOUND, reason, field="step") from None
        except ValueError as error:
            raise OrderRefused(Reason.NOT_FOUND, f"the map cannot be shown: {error}", field="step") from error

    def boards(self, query: asked.BoardsAsked) -> views.BoardsDocument:
        found = self._pages.board_page(BoardQuery(**query.model_dump()))
        return views.BoardsDocument(
            tuple(map(tile_of_row, found)), found[-1].seq if len(found) == query.limit else None
        )

    def board(self, query: asked.OfNumber) -> views.BoardDetail:
        number = query.number
        found = self._pages.board(number)
        if found is None:
            raise OrderRefused(Reason.NOT_FOUND, f"no board {number}", field="number")
        config = self._config()
        listed = self._parts(found)
        parts = tuple(
            views.PartView(**values_of(part, config), box=part.result.subject.box) for part in listed[-PARTS:]
        )
        layout = config.layouts.get(found.board_type)
        framed = [part.seq for part in parts if part.box is not None and part.has_image]
        tile = tile_of_row(found)
        reworks = reworks_of(self._path, found.serial, found.board_type)
        return views.BoardDetail(
            **{name: getattr(tile, name) for name in views.BoardTile.__slots__},
            parts=parts,
            size=None if layout is None or not framed else layout.size,
            frame=framed[0] if framed else None,
            reworks=reworks,
            is_cut=len(listed) > PARTS,
        )

    def _parts(self, board: BoardVerdict) -> Sequence[ListedResult]:
        """Latest results of this run, one more than PARTS at most. The run that is open now is not stored yet."""
        place = board.serial, board.board_type
        known = (run.opened_at for run in self._runs(board.serial) if run.board_type == board.board_type)
        later = [opened_at for opened_at in known if opened_at != board.opened_at]
        return self._pages.numbered(self._store.run_numbers(place, board.opened_at, later, PARTS + 1))

    def reviews(self, query: asked.ReviewsAsked) -> views.ReviewsDocument:
        wanted = ReviewQuery(**query.model_dump())
        found = tuple(each.review for each in self.reviews_read.page(wanted))
        return views.ReviewsDocument(found, found[-1].number if len(found) == query.limit else None)

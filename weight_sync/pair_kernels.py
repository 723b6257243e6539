"""The steps of the kernel of `pairs_gpu`: how weights with scales are read, checked, quantised and written.

`pair` and `move` are rows of the two tables of `take_pairs`, on the device.  FORM and HELD are `PairForm`s, SENT, DTYPE
and VALUES are dtypes (`DTYPE_CODES`).

Shapes: R rows and C columns of a tile, G groups of g columns that have a scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weight_sync.fingerprint_gpu import mix_odd
from weight_sync.fingerprint_words import BLOCK
from weight_sync.spans_gpu import bits_of, read_words, values_of

assert BLOCK == 1 << 12, "the kernel has the number of bits of a word's place in its block"


@triton.jit
def fp8_values(code):
    """Return the numbers of float8_e4m3fn by their bits, as float32."""
    bits = code.to(tl.uint32)
    magnitude = bits & 0x7F
    small = (magnitude.to(tl.float32) * 0.001953125).to(tl.uint32, bitcast=True)
    found = tl.where(magnitude < 8, small, (magnitude << 20) + 0x3C000000)
    found = tl.where(magnitude == 0x7F, 0x7FC00000, found)
    return (found | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def fp8_codes(quotient):
    """Return the bits of quotients in float8_e4m3fn: rounded to the nearest, ties to even, 448 at most."""
    given = quotient.to(tl.uint32, bitcast=True)
    bits = given & 0x7FFFFFFF
    bits = tl.where(bits > 0x43E00000, 0x43E00000, bits)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # The last bit of a number from 2^14 on is that of the smallest number.
    small = (bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    return tl.where(bits < 0x3C800000, small, normal) | ((given >> 24) & 0x80)


@triton.jit
def rounded(value, DTYPE: tl.constexpr):
    """Return numbers rounded to a dtype, as float32."""
    return values_of(bits_of(value, DTYPE), DTYPE).to(tl.float32)


@triton.jit
def coefficients(first, along, table):
    """Return the multiplier of each word `first` [R, 1] + `along` [1, C] of a tensor; C is at most a block's words."""
    at, block = first + along, first >> 12
    here, behind = mix_odd((block * 2).to(tl.uint64)), mix_odd((block * 2 + 2).to(tl.uint64))
    b = tl.load(table + (at & 4095)).to(tl.uint64, bitcast=True)
    return tl.where((at >> 12) == block, here, behind) * b


@triton.jit
def add(place, word, is_there, coefficient):
    """Add what words [R, C] contribute to F."""
    total = tl.sum(tl.sum(tl.where(is_there, word.to(tl.uint64) + 1, 0) * coefficient, 1), 0)
    tl.atomic_add(place, total.to(tl.int64, bitcast=True))


@triton.jit
def mark(place, is_wrong, FLAG: tl.constexpr):
    tl.atomic_or(place, tl.max(tl.max(is_wrong.to(tl.int32), 1), 0) * FLAG)


@triton.jit
def is_row_of(move, y):
    """Return whether rows, counted from the first of a move, are among its rows."""
    return (y >= 0) & (y < tl.load(move + 5))


@triton.jit
def put(storage, live, at, word, mask, WORD: tl.constexpr, FOLDS: tl.constexpr):
    """Write words at elements `at` behind an address; with FOLDS the exclusive or with what is live there."""
    if FOLDS:
        word = word.to(WORD) ^ tl.load(live.to(tl.pointer_type(WORD)) + at, mask=mask, other=0)
    tl.store(storage.to(tl.pointer_type(WORD)) + at, word.to(WORD), mask=mask)


@triton.jit
def read_scales(
    source,
    pair,
    row,
    column,
    is_there,
    FORM: tl.constexpr,
    WORD: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Return the scale of each element (row, column) of a weight in parts, its bits."""
    begin, columns = source + tl.load(pair + 3), tl.load(pair + 7)
    if FORM == 1:
        place = begin + ((row >> 7) * ((columns + 127) >> 7) + (column >> 7)) * WIDTH
        word = read_words(place, is_there, WORD, WIDTH, ALIGNED)
    else:
        word = read_words(begin + (row * (columns // GROUP) + column // GROUP) * 2, is_there, tl.uint16, 2, ALIGNED)
    return word


@triton.jit
def read_tile(
    source,
    pair,
    row,
    column,
    is_there,
    FORM: tl.constexpr,
    SENT: tl.constexpr,
    VALUES: tl.constexpr,
    WORD: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Return a tile [R, C] as it came, words, codes or integers plus 8, and its values in the model's dtype."""
    begin, at = source + tl.load(pair), row * tl.load(pair + 7) + column
    if FORM == 0:
        sent = read_words(begin + at * WIDTH, is_there, WORD, WIDTH, ALIGNED)
        value = values_of(sent, SENT)
        if SENT != VALUES:
            value = rounded(value, VALUES)
    else:
        word = read_scales(source, pair, row, column, is_there, FORM, WORD, WIDTH, GROUP, ALIGNED)
        if FORM == 1:
            sent = tl.load(begin + at, mask=is_there, other=0).to(tl.uint32)
            value = fp8_values(sent) * values_of(word, SENT)
        else:
            both = tl.load(begin + (at >> 1), mask=is_there, other=0).to(tl.uint32)
            sent = (both >> ((at & 1) * 4).to(tl.uint32)) & 15
            value = rounded((sent.to(tl.int32) - 8).to(tl.float32) * values_of(word, 2), 2)
        value = rounded(value, VALUES)
    return sent, value.to(tl.float32)


@triton.jit
def check_scales(
    place,
    pair,
    sums,
    wrong,
    first,
    along,
    is_there,
    table,
    DTYPE: tl.constexpr,
    WORD: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
    FORM: tl.constexpr,
):
    """Sum and check scales: words `first` [R, 1] + `along` [1, C] from `place` on."""
    word = read_words(place + (first + along) * WIDTH, is_there, WORD, WIDTH, ALIGNED)
    add(sums + 1, word, is_there, coefficients(first, along, table))
    scale = values_of(word, DTYPE)
    is_wrong = (scale != scale) | (scale < 0.0) | (scale > 3.4028234663852886e38)
    if FORM == 2:
        is_wrong = is_wrong | (scale == 0.0)
    mark(wrong, is_there & is_wrong, 2)
    mark(wrong, is_there & (scale >= 1.329227995784915872903807060280344576e36), 8)


@triton.jit
def check_parts(
    source,
    pair,
    first_row,
    first_column,
    table,
    sums,
    wrong,
    FORM: tl.constexpr,
    SENT: tl.constexpr,
    WORD: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sum and check the scales of a block, and with the first block of a weight its shape."""
    rows, columns = tl.load(pair + 6), tl.load(pair + 7)
    place = source + tl.load(pair + 3)
    if FORM == 1:
        one = tl.zeros((1, 1), tl.int64)
        first = one + (first_row >> 7) * ((columns + 127) >> 7) + (first_column >> 7)
        check_scales(place, pair, sums, wrong, first, one, one == 0, table, SENT, WORD, WIDTH, ALIGNED, FORM)
    else:
        row, group = (first_row + tl.arange(0, TILE))[:, None], tl.arange(0, TILE // GROUP)[None, :]
        of_row = columns // GROUP
        is_there = (row < rows) & (first_column // GROUP + group < of_row)
        first, along = row * of_row + first_column // GROUP, group.to(tl.int64)
        check_scales(place, pair, sums, wrong, first, along, is_there, table, 2, tl.uint16, 2, ALIGNED, FORM)
        if (first_row == 0) & (first_column == 0):
            nth = tl.arange(0, 2)[None, :].to(tl.int64)
            size = read_words(source + tl.load(pair + 4) + nth * WIDTH, nth >= 0, WORD, WIDTH, ALIGNED)
            add(sums + 2, size, nth >= 0, coefficients(nth * 0, nth, table))
            mark(wrong, size.to(tl.int64) != tl.where(nth == 0, rows, columns), 4)


@triton.jit
def sum_words(source, pair, row, first_column, rows, columns, table, sums, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    """Sum the words of INT4: eight integers each."""
    nth, of_row = tl.arange(0, TILE // 8)[None, :].to(tl.int64), columns // 8
    first = row * of_row + first_column // 8
    is_there = (row < rows) & (first_column // 8 + nth < of_row)
    word = read_words(source + tl.load(pair) + (first + nth) * 4, is_there, tl.uint32, 4, ALIGNED)
    add(sums, word, is_there, coefficients(first, nth, table))


@triton.jit
def quantised_to_groups(value, GROUP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Return integers plus 8 [R, C], the bits of their scales [R, G], and their values [R, C]."""
    value_RGg = tl.reshape(value, (ROWS, TILE // GROUP, GROUP))
    word_RG = bits_of(tl.div_rn(tl.max(tl.abs(value_RGg), 2), 7.5), 2)
    word_RG = tl.where(values_of(word_RG, 2) > 0.0, word_RG, 0x3F80)
    scale_RG1 = tl.expand_dims(values_of(word_RG, 2), 2)
    quotient_RGg = tl.div_rn(value_RGg, scale_RG1)
    near_RGg = tl.minimum(tl.maximum(quotient_RGg, -9.0), 9.0)
    # A number of 23 bits has no fraction: this rounds, ties to even.
    whole_RGg = tl.minimum(tl.maximum((near_RGg + 12582912.0) - 12582912.0, -8.0), 7.0).to(tl.int32)
    held_RGg = whole_RGg.to(tl.float32) * scale_RG1
    return tl.reshape(whole_RGg + 8, (ROWS, TILE)), word_RG, tl.reshape(held_RGg, (ROWS, TILE))


@triton.jit
def write_box(move, storage, live, row, column, is_there, word, WORD: tl.constexpr, FOLDS: tl.constexpr):
    """Write values where a move wants them."""
    y, x = row - tl.load(move + 4), column - tl.load(move + 6)
    is_inside = is_row_of(move, y) & (x >= 0) & (x < tl.load(move + 7)) & is_there
    put(storage, live, y * tl.load(move + 8) + x * tl.load(move + 9), word, is_inside, WORD, FOLDS)


@triton.jit
def write_fp8_rows(move, storage, live, row, first_column, code, scale, FOLDS: tl.constexpr, TILE: tl.constexpr):
    """Write codes [R, C] and the bits of their scale [1, 1] behind them, in each row."""
    width, row_bytes, up_to_scales = tl.load(move + 7), tl.load(move + 8), tl.load(move + 9)
    y, left = row - tl.load(move + 4), first_column - tl.load(move + 6)
    is_row = is_row_of(move, y)
    x = left + tl.arange(0, TILE)[None, :]
    is_inside = is_row & (x >= 0) & (x < up_to_scales)
    put(storage, live, y * row_bytes + x, tl.where(x < width, code, 0), is_inside, tl.uint8, FOLDS)
    is_inside = is_row & (left + y * 0 >= 0) & (left + y * 0 < width)
    put(storage, live, (y * row_bytes + up_to_scales) // 4 + (left >> 7), scale + y * 0, is_inside, tl.uint32, FOLDS)


@triton.jit
def write_int4_rows(
    move,
    storage,
    live,
    row,
    first_column,
    integer,
    word,
    HELD_GROUP: tl.constexpr,
    FOLDS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write integers plus 8 [R, C], two a byte, and the bits of the scales [R, C / 32] behind them."""
    width, row_bytes, up_to_scales = tl.load(move + 7), tl.load(move + 8), tl.load(move + 9)
    y, left = row - tl.load(move + 4), first_column - tl.load(move + 6)
    is_row = is_row_of(move, y)
    integer = tl.where(left + tl.arange(0, TILE)[None, :] < width, integer, 8)
    halves = tl.reshape(integer, (ROWS, TILE // 64, 2, 32))
    place_of_half = 1 + 15 * tl.arange(0, 2)
    byte = tl.reshape(tl.sum(halves * place_of_half[None, None, :, None], 2), (ROWS, TILE // 2))
    at = left // 2 + tl.arange(0, TILE // 2)[None, :]
    put(storage, live, y * row_bytes + at, byte, is_row & (at >= 0) & (at < up_to_scales), tl.uint8, FOLDS)
    group = left // 32 + tl.arange(0, TILE // 32)[None, :]
    word = tl.where(group < (width + HELD_GROUP - 1) // HELD_GROUP * (HELD_GROUP // 32), word, 0)
    is_inside = is_row & (group >= 0) & (group < up_to_scales // 16)
    put(storage, live, (y * row_bytes + up_to_scales) // 2 + group, word, is_inside, tl.uint16, FOLDS)

//! From the engine's books of each choice to the `usage` and `ledger` of a response. Pure sums.

use suanpan_engine::RequestBooks;
use suanpan_ledger::AttnBooks;

use crate::wire::{LedgerReply, PromptDetails, Totals, Usage};

fn totals(computed_tokens: usize, pages_peak: usize, attention: &AttnBooks) -> Totals {
    Totals {
        computed_tokens: computed_tokens as u64,
        attention_flops: attention.flops,
        kv_read_bytes: attention.kv_read_bytes,
        kv_write_bytes: attention.kv_write_bytes,
        pages_peak: pages_peak as u64,
    }
}

/// What was counted in one choice.
pub(crate) fn counted(books: &RequestBooks) -> Totals {
    totals(books.computed_tokens, books.pages_peak, &books.counted)
}

/// What was predicted for one choice.
pub(crate) fn predicted(books: &RequestBooks) -> Totals {
    totals(books.computed_tokens_predicted, books.pages_predicted, &books.predicted)
}

fn add(sum: &mut Totals, more: Totals) {
    sum.computed_tokens += more.computed_tokens;
    sum.attention_flops += more.attention_flops;
    sum.kv_read_bytes += more.kv_read_bytes;
    sum.kv_write_bytes += more.kv_write_bytes;
    sum.pages_peak += more.pages_peak;
}

/// `usage` of a finished response with `n` choices per prompt, books in choice order.
pub(crate) fn usage(books: &[RequestBooks], n: usize) -> Usage {
    let mut ledger = LedgerReply { agree: true, ..LedgerReply::default() };
    for b in books {
        ledger.prompt_tokens += b.prompt_tokens as u64;
        ledger.output_tokens += b.output_tokens as u64;
        ledger.cached_tokens += b.cached_tokens as u64;
        add(&mut ledger.counted, counted(b));
        add(&mut ledger.predicted, predicted(b));
        ledger.agree &= b.agree();
    }
    // OpenAI's usage knows each prompt once, however many choices it has.
    let firsts = || books.iter().step_by(n.max(1));
    let prompt_tokens = firsts().map(|b| b.prompt_tokens as u64).sum();
    let cached_tokens = firsts().map(|b| b.cached_tokens as u64).sum();
    Usage {
        prompt_tokens,
        completion_tokens: ledger.output_tokens,
        total_tokens: prompt_tokens + ledger.output_tokens,
        prompt_tokens_details: PromptDetails { cached_tokens },
        ledger: Some(ledger),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_counts_a_prompt_once_and_the_ledger_every_choice() {
        let one =
            RequestBooks { prompt_tokens: 5, output_tokens: 3, cached_tokens: 2, ..RequestBooks::default() };
        let other = RequestBooks { prompt_tokens: 7, ..one };
        let u = usage(&[one, one, other, other], 2);
        assert_eq!((u.prompt_tokens, u.completion_tokens, u.total_tokens), (12, 12, 24));
        assert_eq!(u.prompt_tokens_details.cached_tokens, 4);
        let ledger = u.ledger.unwrap();
        assert_eq!((ledger.prompt_tokens, ledger.cached_tokens, ledger.agree), (24, 8, true));
    }

    #[test]
    fn one_choice_that_disagrees_makes_the_response_disagree() {
        let good = RequestBooks::default();
        let bad = RequestBooks { pages_peak: 1, ..good };
        assert!(!usage(&[good, bad], 1).ledger.unwrap().agree);
    }
}

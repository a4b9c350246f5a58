//! From the scheduler's plan to the executor's batch, and which logit row belongs to whom.

use suanpan_cache::NO_PAGE;
use suanpan_model::forward::{LogitRows, StepBatch, StepSeq};

use crate::scheduler::{Chunk, Scheduler};

/// One row of logits: after the token at `position` of the request of chunk number `chunk`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub chunk: usize,
    pub position: usize,
}

/// Fills `batch` and `rows` for `chunks`; `logits` says which rows a chunk needs.
pub(crate) fn fill(
    batch: &mut StepBatch,
    rows: &mut Vec<Row>,
    chunks: &[Chunk],
    scheduler: &Scheduler,
    page_size: usize,
    mut logits: impl FnMut(&Chunk) -> LogitRows,
) {
    batch.clear();
    rows.clear();
    let pages = |c: &Chunk| (c.cached_len + c.extend_len).div_ceil(page_size);
    batch.page_table_stride = chunks.iter().map(pages).max().unwrap_or(0);
    for (i, chunk) in chunks.iter().enumerate() {
        let (Some(tokens), Some(ids)) = (scheduler.tokens(chunk.key), scheduler.page_ids(chunk.key)) else {
            unreachable!("a scheduled request runs")
        };
        let end = chunk.cached_len + chunk.extend_len;
        let wanted = logits(chunk);
        batch.tokens.extend_from_slice(&tokens[chunk.cached_len..end]);
        batch.seqs.push(StepSeq {
            cached_len: chunk.cached_len,
            extend_len: chunk.extend_len,
            logits: wanted,
        });
        batch.page_table.extend_from_slice(&ids[..pages(chunk)]);
        batch.page_table.resize((i + 1) * batch.page_table_stride, NO_PAGE);
        if let Some(ids) = scheduler.window_ids(chunk.key) {
            batch.window_table.extend_from_slice(&ids[..pages(chunk)]);
            batch.window_table.resize((i + 1) * batch.page_table_stride, NO_PAGE);
        }
        let first = end - wanted.count(chunk.extend_len);
        rows.extend((first..end).map(|position| Row { chunk: i, position }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::RequestKey;
    use crate::scheduler::{Schedule, SchedulerOptions, SeqSpec};
    use suanpan_cache::PagePool;

    #[test]
    fn tokens_pages_and_rows_line_up() {
        let opts =
            SchedulerOptions { max_num_seqs: 4, max_num_batched_tokens: 8, ..SchedulerOptions::default() };
        let mut scheduler = Scheduler::new(PagePool::new(8, 4).unwrap(), false, opts).unwrap();
        for (key, prompt) in [(0, vec![1, 2, 3]), (1, vec![10, 11, 12, 13, 14, 15, 16])] {
            let max_total = prompt.len() + 1;
            scheduler
                .submit(SeqSpec {
                    key: RequestKey(key),
                    namespace: 0,
                    prompt,
                    max_total,
                    reuse_prefix: false,
                    fork_of: None,
                    cache_priority: 0,
                })
                .unwrap();
        }
        let mut schedule = Schedule::default();
        scheduler.schedule(&mut schedule);
        let (mut batch, mut rows) = (StepBatch::default(), Vec::new());
        let wanted = |c: &Chunk| if c.completes { LogitRows::Last } else { LogitRows::All };
        fill(&mut batch, &mut rows, &schedule.chunks, &scheduler, 4, wanted);
        assert_eq!(batch.tokens, [1, 2, 3, 10, 11, 12, 13, 14]);
        assert_eq!((batch.page_table_stride, batch.page_table.len()), (2, 4));
        assert_eq!(batch.page_table[1], NO_PAGE);
        let expected: Vec<Row> = [(0, 2), (1, 0), (1, 1), (1, 2), (1, 3), (1, 4)]
            .map(|(chunk, position)| Row { chunk, position })
            .into();
        assert_eq!(rows, expected);
        assert_eq!(batch.num_logit_rows(), rows.len());
    }
}
